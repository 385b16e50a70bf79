"""Grammars of answers: from a schema, a regular expression or a grammar to a parser over tokens."""
