"""What `import batchrun` offers: rows of a DataFrame through a model, jobs as objects."""
