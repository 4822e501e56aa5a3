"""What clients hear while an application is redeployed with other settings."""
