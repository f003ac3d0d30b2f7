"""Vision-language-action and flow policies, robot simulators, recorded demonstrations and behaviour cloning."""
