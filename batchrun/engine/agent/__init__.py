"""An engine's agent: a process beside the engine, on any machine, and the daemon's end of it."""
