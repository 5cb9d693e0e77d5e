"""The HTTP edges: `gateway/` for everybody's calls, `api/` for files, batches and control."""
