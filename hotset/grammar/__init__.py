"""Grammars that constrain answers: structures are compiled once, and a matcher follows each answer token by token."""
