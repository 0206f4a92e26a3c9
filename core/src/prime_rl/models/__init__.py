"""Models as trainer and engines share them: set up, loaded, saved, made fresh."""
