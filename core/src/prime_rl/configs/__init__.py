"""Configuration: what a run is, in typed sections. Importing it loads pydantic, never torch."""
