"""Starting and stopping the servers of a queue as processes of this machine."""
