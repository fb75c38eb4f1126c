"""Layouts and options under which one step's gradients must equal full-sequence autograd, by number of ranks.

The flags are those of tools/check_gradients.py.
"""
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
CP2 = "--context-parallel-size 2"
RECOMPUTE = "--recompute-granularity full"
MOE = "--arch moe"
EP2 = f"{MOE} --expert-model-parallel-size 2"
HOST = "--prefix-kv-tier host --prefix-out-tier host"

CASES = {
    1: {
        "one rank": "",
        "another seed": "--seed 7",
        "untied, qk-norm, qkv-bias": "--untie-embeddings-and-output-weights --qk-layernorm --add-qkv-bias",
        "yarn": "--position-embedding-type yarn --yarn-original-max-position-embeddings 64",
        "llama3 scaling": "--use-rope-scaling --rope-scaling-original-max-position-embeddings 64 "
        "--rope-scaling-factor 32 --rope-scaling-low-freq-factor 2",
        "partial rotary, softmax scale": "--rotary-percent 0.5 --softmax-scale 0.4",
        "temperature": "--temperature 0.6",
        "attention recomputed": "--prefix-out-tier none",
        "attention and activations recomputed": f"--prefix-out-tier none {RECOMPUTE}",
        "prompt of 1": "--prompt-tokens 1",
        "prompt of 2, branches of 1": "--prompt-tokens 2 --response-lengths 1,1",
        "prompt of 257, one branch": "--prompt-tokens 257 --response-lengths 30",
        "empty branch among others": "--response-lengths 0,5,0,9",
        "odd chunks and blocks": "--prefix-chunk-tokens 37 --prefix-block-tokens 10",
        "one chunk": "--prefix-chunk-tokens 1000",
        "MLP in blocks": "--prefix-mlp-block-tokens 20",
        "MLP in blocks, recompute": f"--prefix-mlp-block-tokens 63 {RECOMPUTE}",
        "several prompts at once": "--prompts-per-rank 3 --prompt-tokens 100,100,60 --prompts-per-microbatch 2",
        "graphs of all chunks": "--prefix-graph-bytes 1G",
        "graphs of some chunks": "--prefix-graph-bytes 2M --prefix-grad last:3",
        "graphs, recompute": f"--prefix-graph-bytes 1G {RECOMPUTE}",
        "moe": MOE,
        "moe in blocks": f"{MOE} --prefix-mlp-block-tokens 20",
        "moe, top-1, shared expert": f"{MOE} --moe-router-topk 1 --moe-shared-expert-intermediate-size 32",
        "frozen": "--prefix-grad frozen",
        "last:1": "--prefix-grad last:1",
        "last:2": f"--prefix-grad last:2 --prefix-out-tier none {RECOMPUTE}",
        "last:9 is all": "--prefix-grad last:9",
        "host memory": f"{HOST} --prefix-device-bytes 100K",
        "full schedule": "--schedule full",
        "full schedule, recompute": f"--schedule full {RECOMPUTE} --response-lengths 17,0,1",
    },
    2: {
        "cp2": CP2,
        "cp2, attention recomputed": f"{CP2} --prefix-out-tier none {RECOMPUTE}",
        "cp2, prompt of 1, branch of 1": f"{CP2} --prompt-tokens 1 --response-lengths 1",
        "cp2, odd lengths": f"{CP2} --prompt-tokens 257 --response-lengths 7,1,4 --seed 3",
        "cp2, yarn": f"{CP2} --position-embedding-type yarn --yarn-original-max-position-embeddings 64",
        "cp2, softmax scale": f"{CP2} --softmax-scale 0.4 --prompt-tokens 70",
        "cp2, several prompts at once": f"{CP2} --prompts-per-rank 2 --prompts-per-microbatch 2",
        "cp2, graphs": f"{CP2} --prefix-graph-bytes 1G --prompt-tokens 257",
        "cp2, frozen": f"{CP2} --prefix-grad frozen",
        "cp2, last:2": f"{CP2} --prefix-grad last:2",
        "cp2, full schedule": f"{CP2} --schedule full --prompt-tokens 30 --response-lengths 3,40",
        "cp2, host memory, last:2": f"{CP2} {HOST} --prefix-grad last:2",
        "pp2": PP2,
        "pp2, recompute": f"{PP2} {RECOMPUTE}",
        "pp2, recompute, host memory": f"{PP2} {RECOMPUTE} {HOST}",
        "pp2, untied": f"{PP2} --untie-embeddings-and-output-weights",
        "pp2, frozen": f"{PP2} --prefix-grad frozen",
        "pp2, last:2": f"{PP2} --prefix-grad last:2 --branches-per-microbatch 1",
        "pp2, full schedule": f"{PP2} --schedule full",
        "pp2 vpp2": VPP2,
        "pp2 vpp2, three branches apart": f"{VPP2} --branches-per-microbatch 1",
        "pp2 vpp2, one branch": f"{VPP2} --response-lengths 5",
        "tp2 sp": TP2,
        "tp2 sp, recompute, qk-norm, qkv-bias": f"{TP2} {RECOMPUTE} --qk-layernorm --add-qkv-bias",
        "tp2 sp, MLP in blocks": f"{TP2} --prefix-mlp-block-tokens 7",
        "tp2 sp, graphs of some chunks": f"{TP2} --prefix-graph-bytes 1M",
        "tp2 without sp": "--tensor-model-parallel-size 2",
        "tp2 sp, moe": f"{TP2} {MOE} --moe-shared-expert-intermediate-size 32",
        "dp2, different prompts": "--prompt-tokens 256,70 --prompts-per-rank 2",
        "dp2, overlapped reduction": "--overlap-grad-reduce",
        "ep2": EP2,
        "ep2, unequal prompts": f"{EP2} --prompt-tokens 300,1 --response-lengths 1,20,3",
        "ep2, unequal prompts, in blocks": f"{EP2} --prompt-tokens 300,70 --prefix-mlp-block-tokens 20",
        "cp2, ep2": f"{CP2} {EP2}",
    },
    4: {
        "cp4": "--context-parallel-size 4",
        "cp4, prompt of 2": "--context-parallel-size 4 --prompt-tokens 2 --response-lengths 1,3",
        "dp4, ep2, unequal chunk counts": f"{EP2} --prompt-tokens 256,100,3 --prompts-per-rank 2",
        "tp2 sp, cp2, one token each": f"{TP2} {CP2} --prompt-tokens 1 --response-lengths 1",
        "tp2 sp, ep2": f"{TP2} {EP2}",
        "pp2, cp2, ep2, recompute": f"{PP2} {CP2} {EP2} {RECOMPUTE}",
        "pp2, dp2, ep2, unequal prompts": f"{PP2} {EP2} --prompt-tokens 200,65",
        "pp4": "--pipeline-model-parallel-size 4 --num-layers 4",
    },
    8: {
        "cp8": "--context-parallel-size 8",
        "cp8, odd lengths": "--context-parallel-size 8 --prompt-tokens 257 --response-lengths 7 --seed 5",
        "tp2 sp, pp2, cp2": f"{TP2} {PP2} {CP2} {RECOMPUTE}",
    },
}

ROUNDED = {
    "fp8": ("--prefix-kv-dtype fp8", 6e-2, 5e-2),
    "bf16": ("--prefix-kv-dtype bf16", 4e-3, 4e-3),
    "bf16 gradients": ("--prefix-grad-dtype bf16", 2.5e-3, 1e-5),
}
"""Options that round the prefix state, and what they may cost in float32: the worst parameter's error and the largest
difference of a log-prob, each twice what was measured."""

MUTATIONS = {
    "ascending prefix backward": PP2,
    "no seed": CP2,
    "seed at forward time": PP2,
    "finalized twice": CP2,
    "last chunk not walked back": "",
    "pads stored": f"{CP2} --prompt-tokens 258",
}
