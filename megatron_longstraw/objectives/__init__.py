"""What is optimised: advantages, aggregations and losses, as pure functions that end in token weights."""
