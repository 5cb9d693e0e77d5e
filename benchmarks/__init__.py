"""Every figure that the project claims, one module per question."""
