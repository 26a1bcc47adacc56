"""Tables, pictures and files of what was measured."""
