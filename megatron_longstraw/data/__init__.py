"""What a run reads: prompts, rollouts, and the tokenizer between text and ids. Imports no torch.

    task.py                           what a run needs of a source of prompts, and what a prompt must keep to
    tokenizers.py                     Hugging Face and SentencePiece
    rows.py                           lines of a JSONL file
    prompt_rows.py, prompt_files.py   one row of a prompt file; the rows of one file (JSONL, Parquet)
    prompt_set.py, file_task.py       the rows of several files; a source of prompts made of them
    rollout_rows.py, rollout_groups.py, rollout_files.py
                                      one row of a rollout file; rows as groups; files written and read by step
"""
