"""What a run needs, computed from its configuration alone. Imports no torch.

    bytes.py   bytes per rank: what is stored, exactly, and an estimate of activations
    plan.py    the plan of a run as text: layout, tokens, bytes, padded vocabulary, timeouts
"""
