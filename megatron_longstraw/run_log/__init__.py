"""What a run leaves behind and shows on its way.

    log.py          RunLog: the run folder, and lines on the screen
    sinks.py        metrics as JSON lines, for TensorBoard, for Weights & Biases
    progress.py     how far a long phase is
    environment.py  what the run ran on
"""
from megatron_longstraw.run_log.environment import peak_memory_bytes
from megatron_longstraw.run_log.log import RunLog, moving_average
from megatron_longstraw.run_log.sinks import check_sinks, read_metrics

__all__ = ["RunLog", "check_sinks", "moving_average", "peak_memory_bytes", "read_metrics"]
