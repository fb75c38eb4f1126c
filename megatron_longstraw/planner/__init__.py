"""What a run needs, computed from its configuration alone. Imports no torch.

    shape.py       a run as the planner sees it; the one function that reads it from the configuration
    parameters.py  numbers of parameters, products of a layer
    tape.py layer.py experts.py working.py
                   tensors of a layer as they come and go; what is alive when most is
    bytes.py       bytes per rank
    hardware.py    devices and their rates, with sources
    seconds.py     seconds of a step, by call
    solve.py       longest contexts, single choices, layouts
    plan.py        the plan of a run as text: layout, tokens, bytes, padded vocabulary, timeouts
    chunks.py      how long a prompt chunk may be
    __main__.py    the command line
"""
