"""Evaluation by questions that are answered correctly only if attention reads the right rows."""
