"""What GradScaler is made of: bounds, unscaling, clips, losses, and outcomes of steps."""
