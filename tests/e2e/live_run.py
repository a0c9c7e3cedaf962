"""`python -m grpo.train`, whose page is written every second from the first step on."""

from grpo.run import live_page

if __name__ == "__main__":
    live_page.EVERY, live_page.PORTION = 1.0, 1.0
    from grpo.train import main

    main()
