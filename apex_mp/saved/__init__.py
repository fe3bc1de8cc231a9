"""Every format of a file, in and out, of each era."""
