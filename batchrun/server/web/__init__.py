"""The web page: what is shown, to whom, and what may be done from there."""
