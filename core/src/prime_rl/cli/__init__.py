"""The command line. `main` dispatches; every command is a module of its own, imported when used."""
