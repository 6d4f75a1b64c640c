"""Evaluation: questions whose answers depend on the right rows being read, put to a local engine or to a server."""
