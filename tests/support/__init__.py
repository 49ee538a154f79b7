"""What several test files share. Nothing here is imported by the package."""
