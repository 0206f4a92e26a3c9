"""Starting the processes of a run on this machine."""
