"""Images: files and folders of them, decoded, kept, changed and checked."""
