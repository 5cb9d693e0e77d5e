"""The loop that feeds engines, collects outcomes and commits them."""
