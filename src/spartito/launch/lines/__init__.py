"""Jobs whose tasks are on lines of a given rate: network namespaces of this machine."""
