/** The timeline of a job, loaded and drawn when it is unfolded. */

import { ask } from "./api.js";
import { folded, h } from "./dom.js";
import { readPieces } from "./pieces.js";
import { showing } from "./problem.js";
import { drawTimeline } from "./timeline.js";

/** Return the folded timeline of the job at `path`. */
export function timelineNode(path) {
  const faults = h("div");
  const place = h("div");
  const again = h("button", { type: "button", onclick: draw }, "Draw it as it is now");
  const { node } = folded("Timeline of slots", again, faults, place);
  let drawn = null;
  async function draw() {
    await showing(faults, async () => {
      const data = await ask(`${path}/timeline`, { read: (stream) => readPieces(stream, "attempts", "conversation") });
      drawn?.destroy();
      drawn = drawTimeline(place, data);
    });
  }
  node.addEventListener("toggle", () => {
    if (node.open && drawn === null) draw();
  });
  return { node, close: () => drawn?.destroy() };
}
