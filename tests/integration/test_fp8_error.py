"""The tool that measures what FP8 prompt passes change, and what they can save."""
import argparse

import fp8_error
import numpy as np
import pytest
from gradient_case import make_case, parse, tool_parser

from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.data.tokenizers import load_tokenizer
from tests.checkouts import ROOT
from tests.tiny_tokenizers import TEXTS, byte_level


@pytest.mark.parametrize(
    ("prompt_tokens", "saved"), [(50_000, 0.26), (131_072, 0.15), (1_048_576, 0.024), (2_100_000, 0.012)]
)
def test_how_much_of_a_prompt_linear_layers_are(prompt_tokens, saved):
    """Qwen3-8B with its linear layers in half the time: a quarter at 50K, a percent or two at 2.1M."""
    model = load_config([ROOT / "launch" / "models" / "qwen3-8b.toml"]).resolve().model
    assert fp8_error.linear_share(model, prompt_tokens) / 2 == pytest.approx(saved, abs=0.005)


def test_experts_count_as_often_as_a_token_passes_one():
    experts = dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=192, moe_shared_expert_intermediate_size=128)
    dense, moe = (load_config(overrides=more).resolve().model for more in ({"ffn_hidden_size": 512}, experts))
    assert fp8_error.linear_share(moe, 1000) == fp8_error.linear_share(dense, 1000)


def prepared(flags, **more):
    config, args = parse(flags.split(), parser=tool_parser(""))
    return config, argparse.Namespace(**vars(args), **more)


def test_errors_by_recipe():
    flags = "--prompt-tokens 70 --response-lengths 5,3 --hidden-size 32 --ffn-hidden-size 64"
    results = fp8_error.measure(*prepared(flags, text=None))
    assert list(results) == ["tensorwise", "blockwise"]
    for result in results.values():
        assert result["backend"] == "emulated"
        assert 0 < result["mean_logprob_diff"] < result["max_logprob_diff"] < 0.3
        assert 0.005 < result["grad_rel_err"] < 0.2
        assert result["grad_cosine"] == pytest.approx(1 - result["grad_rel_err"] ** 2 / 2, abs=0.01)
    (only,) = fp8_error.measure(*prepared(f"{flags} --fp8-prefix blockwise", text=None)).items()
    assert only == ("blockwise", results["blockwise"])


def test_a_text_and_its_continuation(tmp_path):
    folder = byte_level(tmp_path / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS))
    ids = load_tokenizer(folder).encode(text.read_text())
    config, args = prepared("--prompt-tokens 30 --response-lengths 6,4")
    case = make_case(config, args, 1)
    (group,) = fp8_error.text_case(case, text, folder).groups
    np.testing.assert_array_equal(group.prompt_ids, ids[:30])
    assert [branch.response_ids.tolist() for branch in group.branches] == [ids[30:36].tolist(), ids[30:34].tolist()]
    text.write_text("a short one")
    with pytest.raises(ConfigError, match="need 36; change --text or --prompt-tokens"):
        fp8_error.text_case(case, text, folder)
