"""Everything that knows Megatron-Core. No other folder imports megatron."""
