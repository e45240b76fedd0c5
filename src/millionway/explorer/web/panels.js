"use strict";
// Images beside the map and in the other tabs. Text is always set as text, never as HTML.

const Panel = {
  places: [], // of the gallery that is shown
  back: [],

  make(kind, about = {}, ...children) {
    const element = document.createElement(kind);
    for (const [name, value] of Object.entries(about)) {
      if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
      else if (name in element) element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  },

  open(title, ...children) {
    const panel = document.getElementById("panel");
    panel.querySelector("h2").textContent = title;
    panel.querySelector(".body").replaceChildren(...children);
    panel.querySelector(".body").scrollTop = 0;
    panel.hidden = false;
    document.getElementById("save").hidden = Panel.places.length === 0;
  },

  close() {
    document.getElementById("panel").hidden = true;
    Panel.places = [];
    Panel.back = [];
    Atlas.selected = -1;
    App.standOut(null);
  },

  tile(place, side, caption, keep) {
    const picture = Panel.make("div", { className: "tile" });
    picture.style.width = picture.style.height = side + "px";
    Panel.whenSeen(picture, () => Data.tile(picture, place, side).catch(console.error));
    const button = Panel.make("button", { on: { click: () => Panel.image(place) } }, picture, caption ?? "");
    button.dataset.place = place;
    if (keep) button.classList.add("keep");
    Data.paths().then((paths) => (button.title = paths[place]));
    return button;
  },

  whenSeen(element, act) {
    element.act = act;
    Panel.watcher.observe(element);
  },

  watcher: new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      Panel.watcher.unobserve(entry.target);
      entry.target.act();
    }
  }, { rootMargin: "200px" }),

  // At most so many at first; the rest when asked for.
  grid(places, captions, start = 0) {
    const some = 300, grid = Panel.make("div", { className: "gallery" });
    const add = (from) => {
      places.slice(from, from + some).forEach((place, n) => grid.append(Panel.tile(place, 64, captions?.[from + n])));
      if (from + some < places.length) {
        const more = Panel.make("button", { on: { click: () => { more.remove(); add(from + some); } } }, "More");
        grid.append(more);
      }
    };
    add(start);
    return grid;
  },

  gallery(title, places, captions, query) {
    Panel.places = places;
    Atlas.selected = -1;
    App.standOut(places);
    const about = query ? Panel.make("div", { className: "query" }, query) : null;
    Panel.open(`${title}: ${places.length.toLocaleString("en")} images`, ...(about ? [about] : []), Panel.grid(places, captions));
  },

  async image(place, isBack = false) {
    if (!isBack && Atlas.selected >= 0) Panel.back.push(Atlas.selected);
    Atlas.selected = place;
    Panel.places = [];
    Atlas.draw();
    const [paths, near, address] = await Promise.all([
      Data.paths(), Data.neighbors(place), Data.about.large ? Data.large(place).catch(() => null) : null,
    ]);
    if (Atlas.selected !== place) return; // another one was chosen meanwhile
    const picture = address
      ? Panel.make("img", { className: "large", alt: paths[place], src: address })
      : Panel.make("div", { className: "tile" });
    if (address) picture.addEventListener("error", () => picture.replaceWith("This image is no longer there."));
    else {
      picture.style.width = picture.style.height = "256px";
      Data.tile(picture, place, 256);
    }
    const facts = Panel.make("dl", { className: "facts" });
    const add = (name, value) => facts.append(Panel.make("dt", {}, name), Panel.make("dd", {}, value));
    add("path", paths[place]);
    for (const [number, column] of Data.about.columns.entries()) {
      const value = (await Data.column(number))[place];
      if (!Number.isNaN(value)) add(column.title, App.wordOf(column, value));
    }
    if (Atlas.selected !== place) return;
    const copy = Panel.make("button", { id: "copy", on: { click: () => App.copy(paths[place]) } }, "Copy path");
    const show = Panel.make("button", { on: { click: () => { App.tab("map"); Atlas.goTo(place, 12); } } }, "Show on the map");
    const strip = Panel.grid(near.map((each) => each.place), near.map((each) => each.cosine.toFixed(2)));
    strip.id = "neighbors";
    Panel.near = near;
    Panel.open(paths[place].split("/").pop(), picture, copy, " ", show, Panel.make("h3", {}, "Nearest neighbors"), strip, facts);
    document.getElementById("panel").dataset.place = place;
  },

  async duplicates() {
    const tab = document.getElementById("duplicates-tab");
    if (tab.firstChild) return;
    const groups = await Data.json("duplicates.json"), wide = Panel.make("div", { className: "wide" });
    wide.append(Panel.make("h2", {}, "Groups of the same or nearly the same picture"));
    wide.append(Panel.make("p", {}, groups.length
      ? `${Data.about.num_groups.toLocaleString("en")} groups, the largest first. The framed one is the one to keep. Nothing is deleted here.`
      : "Every picture is there once."));
    for (const group of groups) {
      const line = Panel.make("div", { className: "group" });
      group.places.slice(0, 40).forEach((place, n) => line.append(Panel.tile(place, 96, "", group.keep[n])));
      if (group.places.length > 40) line.append(`and ${group.places.length - 40} more`);
      wide.append(line);
    }
    tab.append(wide);
  },

  async outliers() {
    const tab = document.getElementById("outliers-tab");
    if (tab.firstChild) return;
    const [found, paths] = await Promise.all([Data.json("outliers.json"), Data.paths()]);
    const wide = Panel.make("div", { className: "wide" });
    wide.append(Panel.make("h2", {}, "What does not belong, the strangest first"));
    for (const each of found) {
      const picture = Panel.make("div", { className: "tile" });
      Panel.whenSeen(picture, () => Data.tile(picture, each.place, 64).catch(console.error));
      const line = Panel.make("button", { className: "strange", on: { click: () => Panel.image(each.place) } }, picture,
        Panel.make("b", {}, each.score.toFixed(2)),
        Panel.make("span", {}, each.reason || "a little apart", Panel.make("br"), paths[each.place]));
      line.dataset.place = each.place;
      wide.append(line);
    }
    tab.append(wide);
  },

  run() {
    const frame = document.querySelector("#run-tab iframe");
    frame.src = Data.static ? "report.html" : "data/report.html";
  },
};
