"""Routers: which engine a call or a row goes to, best first."""
