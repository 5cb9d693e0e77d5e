"""The capacity planner: engines for the peak, and what jobs cost beside the calls."""
