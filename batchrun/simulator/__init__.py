"""The simulator: the shipped scheduler on a virtual clock, with gateway and daemon around it."""
