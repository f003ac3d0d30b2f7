"""Vision-language-action and flow policies, the simulators of robots, recorded demonstrations and cloning them."""
