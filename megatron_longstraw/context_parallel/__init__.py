"""Who holds which positions, and the collectives over the context-parallel group."""
