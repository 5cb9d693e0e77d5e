"""Commands of whoever runs the deployment: engines, keys, the store, what is watched."""
