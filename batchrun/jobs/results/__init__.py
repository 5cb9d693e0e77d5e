"""The file that a job ends with."""
