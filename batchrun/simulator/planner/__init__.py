"""The capacity planner: engines for the peak, and what jobs get co-located with the calls."""
