// Following: while an answer grows, its end and the field below it stay on the screen. Whoever scrolls back stays where
// he is, until he comes to the end again.

export class Follower {
  constructor(last) {
    this.last = last; // the element that is to stay in view
    this.on = false;
    this.top = scrollY;
    addEventListener("scroll", () => this.scrolled(), { passive: true });
  }

  start() { this.on = true; this.step(); }

  stop() { this.on = false; }

  // Something grew. At once, not smoothly: the next word comes before a smooth scroll ends.
  step() {
    if (this.on) this.last.scrollIntoView({ block: "nearest", behavior: "instant" });
    this.top = scrollY;
  }

  scrolled() {
    if (scrollY < this.top) this.on = false;
    else if (scrollY > this.top) this.on = this.last.getBoundingClientRect().bottom <= innerHeight;
    this.top = scrollY;
  }
}
