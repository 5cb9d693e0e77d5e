"""The pool: the whole of a job known at once, and the order that wastes no prefix."""
