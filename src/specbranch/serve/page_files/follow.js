// Following: while an answer grows, its end stays on the screen, above the dock with the field. Whoever scrolls back
// stays where he is, until he comes to the end again. Owns the room that the dock and a phone's keyboard take.

const JITTER = 2; // pixels by which a browser rounds

export class Follower {
  constructor(end, dock) {
    this.end = end; // an element that is to stay in view
    this.dock = dock;
    this.on = false;
    this.top = scrollY;
    addEventListener("scroll", () => this.scrolled(), { passive: true });
    new ResizeObserver(() => this.room()).observe(dock);
    for (const kind of ["resize", "scroll"]) visualViewport?.addEventListener(kind, () => this.room());
    this.room();
  }

  // A keyboard that lies over the page, as on some phones, would hide the dock.
  room() {
    const style = document.documentElement.style, keyboard = visualViewport ? innerHeight - visualViewport.height - visualViewport.offsetTop : 0;
    style.setProperty("--keyboard", `${visualViewport?.scale === 1 ? Math.max(keyboard, 0) : 0}px`);
    style.setProperty("--dock", `${this.dock.offsetHeight}px`);
  }

  start() { this.on = true; this.step(); }

  stop() { this.on = false; }

  // Something grew. At once, not smoothly: the next word comes before a smooth scroll ends.
  step() {
    if (this.on) this.end.scrollIntoView({ block: "nearest", behavior: "instant" });
    this.top = scrollY;
  }

  scrolled() {
    if (scrollY < this.top - JITTER) this.on = false;
    else if (scrollY > this.top + JITTER) this.on = this.end.getBoundingClientRect().bottom <= innerHeight - this.dock.offsetHeight + 24;
    this.top = scrollY;
  }
}
