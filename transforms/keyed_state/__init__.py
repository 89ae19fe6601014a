"""The wrapper around an author's stateful DoFn: one clock per key, exact cuts."""
