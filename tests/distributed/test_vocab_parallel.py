"""The head with its vocabulary cut over two ranks, and which positions ever meet it."""
import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_longstraw.config import load_config
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.calls import capture, full_sequences, prefix_backward, replay
from megatron_longstraw.mcore.logprobs import ResponseHead, VocabParallelLogProb
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.types import Branch, PromptGroup
from tests.distributed.launch import run_ranks
from tests.oracles.textbook_logprobs import textbook_logprobs
from tests.tolerances import LOGPROB_ABSOLUTE, LOGPROB_GRADIENT, relative_error
from tests.tracking import Tracker

pytestmark = pytest.mark.dist

ROWS, HIDDEN, PADDED, TEMPERATURE = 11, 8, 64, 0.7
CASES = {"pads on the last rank": 50, "no pads": 64, "one rank of pads only": 20, "pads begin with the rank": 32}
"""True vocabulary sizes; rank 0 holds ids 0..31, rank 1 the rest."""


def inputs(vocab):
    generator = torch.Generator().manual_seed(vocab)
    rows, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (ROWS, PADDED))
    weight[vocab:] = 7.0
    labels = torch.randint(0, vocab, (ROWS,), generator=generator)
    labels[:4] = torch.tensor([0, vocab - 1, min(31, vocab - 1), min(32, vocab - 1)])  # both sides of the cut
    return rows, weight, labels, torch.randn(ROWS, generator=generator)


def vocab_parallel(rank):
    results = {}
    for name, vocab in CASES.items():
        rows, weight, labels, dlogprobs = inputs(vocab)
        own = weight.chunk(2)[rank].clone().requires_grad_()
        rows.requires_grad_()
        logprobs, entropy = VocabParallelLogProb.apply(rows, own, labels, TEMPERATURE, vocab, 4, dist.group.WORLD)
        logprobs.backward(dlogprobs)
        results[name] = logprobs.detach(), entropy, rows.grad, own.grad
    return results


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(vocab_parallel, 2)


def truth(vocab):
    rows, weight, labels, dlogprobs = inputs(vocab)
    leaves = [x.double().requires_grad_() for x in (rows, weight)]
    logprobs, entropy = textbook_logprobs(*leaves, labels, TEMPERATURE, vocab)
    (logprobs * dlogprobs.double()).sum().backward()
    return logprobs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_whole_vocabulary(two_ranks, name):
    """A label on the other rank, a maximum on the other rank, a rank that holds nothing but pads: every rank knows
    the log-prob and the entropy, and all know the very same bits (else ranks drift apart)."""
    logprobs, entropy, *_ = truth(CASES[name])
    for result in two_ranks:
        own_logprobs, own_entropy, *_ = result[name]
        assert float((own_logprobs.double() - logprobs).abs().max()) <= LOGPROB_ABSOLUTE
        assert float((own_entropy.double() - entropy).abs().max()) <= LOGPROB_ABSOLUTE
    for ours, theirs in zip(two_ranks[0][name][:2], two_ranks[1][name][:2]):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_whole_vocabulary(two_ranks, name):
    """The gradient of the rows is the sum over ranks; that of the weight stays with its owner; pads get exactly 0."""
    *_, drows, dweight = truth(CASES[name])
    parts = [result[name] for result in two_ranks]
    assert relative_error(parts[0][2] + parts[1][2], drows) <= LOGPROB_GRADIENT
    own_dweight = torch.cat([part[3] for part in parts])
    assert relative_error(own_dweight, dweight) <= LOGPROB_GRADIENT
    assert not own_dweight[CASES[name] :].any()


# -- which tokens are computed ---------------------------------------------------------------------------------

PROMPT_TOKENS, RESPONSE_TOKENS, NUM_BRANCHES = 64, 4, 8
MODEL = dict(
    num_layers=1,
    hidden_size=40,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=56,
    vocab_size=5000,
    prefix_chunk_tokens=16,
    branches_per_microbatch=4,
    log_probs_chunk_size=8,
)
QKV_COLUMNS, VOCAB_COLUMNS = (4 + 2 + 2) * 8, 5120


def count_tokens(rank):
    """(rows of qkv projected, rows of logits made, largest logits) by call; and the table of log-probs by schedule."""
    config = load_config([], MODEL).resolve()
    policy = Policy(config, parallel.initialize(config))
    rng = np.random.default_rng(0)
    branches = [Branch(rng.integers(0, 5000, RESPONSE_TOKENS)) for _ in range(NUM_BRANCHES)]
    batch = PromptBatch([PromptGroup(rng.integers(0, 5000, PROMPT_TOKENS), branches)])
    weights = {(0, i): np.ones(RESPONSE_TOKENS, np.float32) for i in range(NUM_BRANCHES)}
    counts, results = {}, {}

    def track(name, call):
        with Tracker() as tracker:
            results[name] = call()
        counts[name] = (
            tracker.rows_multiplied_to(QKV_COLUMNS),
            tracker.rows_multiplied_to(VOCAB_COLUMNS),
            max(tracker.rows_with_columns(VOCAB_COLUMNS), default=0),
        )
        return results[name]

    store = track("capture", lambda: capture(policy, batch))
    branch, _ = track("replay", lambda: replay(policy, store, batch, weights))
    track("prefix_backward", lambda: prefix_backward(policy, store, batch))
    full, _ = track("full", lambda: full_sequences(policy, batch, weights))
    return counts, branch, full, sampling_logits(policy)


def sampling_logits(policy):
    """The head's logits and log-probs of the same rows."""
    head: ResponseHead = policy.head
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 4999, 17])
    with torch.no_grad():
        return head.logits(rows), labels, head.logprobs(rows, labels)[0]


@pytest.fixture(scope="module")
def counted():
    return run_ranks(count_tokens, 1)[0]


def test_tokens_put_through_the_stack(counted):
    """F15: capture 63 tokens and replay 32 (the walk back 63 more) against 8 * 67 of full sequences. A sharing option
    that nothing reads would show the same numbers on both sides."""
    counts = counted[0]
    projected = {name: count[0] for name, count in counts.items()}
    assert projected == {"capture": 63, "replay": 8 * 4, "prefix_backward": 63, "full": 8 * 67}


def test_only_response_positions_meet_the_vocabulary(counted):
    """C17: logits of 32 response tokens, once forward and once backward, at most 8 rows at a time, in both schedules;
    none for the prompt."""
    counts = counted[0]
    produced = {name: count[1] for name, count in counts.items()}
    assert produced == {"capture": 0, "replay": 2 * 32, "prefix_backward": 0, "full": 2 * 32}
    largest = {name: count[2] for name, count in counts.items()}
    assert largest == {"capture": 0, "replay": 8, "prefix_backward": 0, "full": 4}


def test_schedules_agree_on_log_probs(counted):
    """The counts above are of calls that computed the same thing."""
    _, branch, full, _ = counted
    assert branch.keys() == full.keys()
    for place in branch:
        assert np.abs(branch[place] - full[place]).max() <= LOGPROB_ABSOLUTE


def test_sampling_sees_the_true_vocabulary(counted):
    """A padded id that could be sampled has no embedding in any other tool; temperature 1 as sampling expects."""
    logits, labels, logprobs = counted[3]
    assert logits.shape == (3, 5000)
    expected = torch.log_softmax(logits.double(), dim=1).gather(1, labels[:, None])[:, 0]
    assert float((logprobs.double() - expected).abs().max()) <= LOGPROB_ABSOLUTE
