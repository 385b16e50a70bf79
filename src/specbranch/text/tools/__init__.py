"""Tool calls and reasoning in the text of an answer."""
