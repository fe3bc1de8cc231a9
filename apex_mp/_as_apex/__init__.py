"""The name `apex`: what `import apex` and its like find while apex_mp stands in for it."""
