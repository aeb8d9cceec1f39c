// A page that was opened from a folder cannot start a worker: the search then runs in a frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const source = String(url).replaceAll("&", "&amp;");
      Object.assign(frame, { hidden: true, title: "Search", srcdoc: `<script src="${source}"></script>` });
      this.target = new Promise((ready) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          ready(inside);
        };
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      (await this.target).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
