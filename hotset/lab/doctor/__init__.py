"""`hotset doctor`: checks a machine for what an engine needs, and says what to do where it is slow or broken."""
