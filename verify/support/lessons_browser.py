# SPDX-License-Identifier: MIT OR Unlicense
"""lessons_browser.py PAGE DRIVER OUT - opens the page of the lessons in headless Chromium, at 400 and 1,200 pixels, light and dark;
clicks every link, slider and question, and takes pictures into OUT. Prints a line for each test, as the suites do."""
import sys

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


def test(name, wrong):
    print(f"FAIL {name}: {wrong}" if wrong else f"ok {name}")


def opened(driver, width, dark):
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", f"--window-size={width},1400"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.chrome.service.Service(driver))
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": False})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": dark}]})
    return browser


def look(browser, name, width, page, out):
    browser.get("file://" + page)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    test(f"browser_{name}_width", wide > width and f"the page is {wide} pixels wide")
    small = browser.execute_script("""
        return [...document.querySelectorAll('svg text')].filter(t => t.getClientRects().length &&
            t.getBoundingClientRect().height < 9).map(t => t.textContent).slice(0, 3)""")
    test(f"browser_{name}_text", small and f"text of less than 9 pixels: {small}")
    out_of = browser.execute_script("""
        return [...document.querySelectorAll('svg text')].filter(t => {
            const text = t.getBoundingClientRect(), svg = t.closest('svg').getBoundingClientRect();
            return text.width && (text.left < svg.left - 1 || text.right > svg.right + 1); }).map(t => t.textContent).slice(0, 3)""")
    test(f"browser_{name}_cut", out_of and f"a picture cuts off: {out_of}")
    colors = browser.execute_script("""
        const dark = c => c.match(/[0-9]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) < 384;
        const style = getComputedStyle(document.body);
        return [dark(style.backgroundColor), dark(style.color)]""")
    test(f"browser_{name}_colors", colors != ([True, False] if name.endswith("dark") else [False, True]) and f"{colors}")
    for number in range(1, 10):
        browser.execute_script(f"document.getElementById('lesson{number}').scrollIntoView()")
        browser.save_screenshot(f"{out}/{name}_{number}.png")


def click(browser):
    links = browser.find_elements(By.CSS_SELECTOR, "nav a")
    off = []
    for link in links:
        link.click()
        top = browser.execute_script("return document.querySelector(location.hash).getBoundingClientRect().top")
        if not -1500 < top < 1400:
            off.append((link.text, top))
    test("browser_links", len(links) < 10 and f"{len(links)} links" or off)
    shown = "return [...arguments[0].querySelectorAll('g.frame')].map(g => g.style.display != 'none')"
    wrong, sliders = [], browser.find_elements(By.CSS_SELECTOR, "input[type=range]")
    for slider in sliders:
        svg = slider.find_element(By.XPATH, "./../preceding-sibling::*[name()='svg']")
        for frame in range(1, len(browser.execute_script(shown, svg))):
            slider.send_keys(Keys.RIGHT)
            are = browser.execute_script(shown, svg)
            if are != [i == frame for i in range(len(are))]:
                wrong.append(are)
    test("browser_sliders", len(sliders) < 3 and f"{len(sliders)} sliders" or wrong)
    questions = browser.find_elements(By.CSS_SELECTOR, "details")
    for question in questions:
        question.find_element(By.TAG_NAME, "summary").click()
    closed = [q.text[:40] for q in questions if not q.get_attribute("open")]
    test("browser_questions", len(questions) < 9 and f"{len(questions)} questions" or closed)
    said = [line["message"][:200] for line in browser.get_log("browser")]
    test("browser_console", said)


def main(page, driver, out):
    for name, width, dark in (("400_light", 400, "light"), ("1200_light", 1200, "light"), ("1200_dark", 1200, "dark")):
        try:
            browser = opened(driver, width, dark)
        except WebDriverException as error:
            sys.exit(print("skip Chromium does not start here:", str(error).splitlines()[0]))
        look(browser, name, width, page, out)
        if name == "1200_light":
            click(browser)
        browser.quit()


main(*sys.argv[1:])
