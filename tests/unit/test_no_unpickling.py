"""A file whose pickle would run code is refused wherever models, tokenizers, prompts and rollouts come in."""
import json
import pickle
from pathlib import Path

import pytest

from megatron_longstraw.config import DataConfig, load_config
from megatron_longstraw.convert.folder import HFFolder
from megatron_longstraw.data.prompt_set import PromptSet
from megatron_longstraw.data.rollout_files import RolloutReader
from megatron_longstraw.data.tokenizers import load_tokenizer

MAX_ROW_BYTES = load_config().data.max_row_bytes


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.fixture
def bomb(tmp_path):
    """(the pickle, the file that unpickling it makes)"""
    trace = tmp_path / "ran"
    data = pickle.dumps(Bomb(trace))
    pickle.loads(data)
    assert trace.exists(), "it works"
    trace.unlink()
    return data, trace


CONFIG = dict(
    model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=90,
    rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=256,
)  # fmt: skip


def file_named(name, reader):
    def read(path: Path, data: bytes):
        (path / name).write_bytes(data)
        return reader(path / name)

    return read


def model(path):
    (path.parent / "config.json").write_text(json.dumps(CONFIG))
    return HFFolder(path.parent)


def prompts(path):
    return PromptSet([path], DataConfig())


def rollouts(path):
    return RolloutReader(path, MAX_ROW_BYTES).prompts(0, 1)


CASES = {
    "pickled weights": (file_named("pytorch_model.bin", model), "never unpickled"),
    "a pickle named safetensors": (file_named("model.safetensors", model), "is no whole safetensors file"),
    "prompts .pkl": (file_named("prompts.pkl", prompts), "need a .jsonl file"),
    "prompts .jsonl": (file_named("prompts.jsonl", prompts), "is not UTF-8"),
    "prompts .parquet": (file_named("prompts.parquet", prompts), "is not a whole Parquet file"),
    "rollouts": (file_named("rollouts.jsonl", rollouts), "is not UTF-8"),
    "tokenizer.json": (file_named("tokenizer.json", load_tokenizer), "is not JSON"),
    "tokenizer .model": (file_named("tokenizer.model", load_tokenizer), "is no SentencePiece model"),
    "tokenizer .pkl": (file_named("tokenizer.pkl", load_tokenizer), "need a Hugging Face folder"),
}


@pytest.mark.parametrize(("read", "words"), CASES.values(), ids=CASES)
def test_a_pickle_is_refused_and_does_not_run(read, words, bomb, tmp_path):
    data, trace = bomb
    with pytest.raises(ValueError) as error:
        read(tmp_path, data)
    assert words in str(error.value) and not trace.exists()
