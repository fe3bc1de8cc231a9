"""The name `apex`: the modules that `import apex` finds while apex_mp replaces it."""
