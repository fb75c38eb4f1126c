"""Hugging Face model folders: one table per family that serves both directions. Imports no megatron.

    families/             what a family's config.json means, and where its tensors go
    tensors.py            the rules such tables are made of: which block of which tensor is which block of a parameter
    hf_config.py, rope.py config.json, in the layouts of transformers 4 and 5, as our model configuration
    safetensors_files.py  the files: headers and index checked, blocks read and written in place
    folder.py             all of a folder together
    adopt.py              a run's configuration with a folder's model in it
"""
